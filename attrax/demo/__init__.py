"""The demonstration: a corpus, a small model, and the run that attributes its answers."""
