"""Data and tables: examples from files and texts, packed or not, and scores on the way out."""
