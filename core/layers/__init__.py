"""Layer rules by layer type; each file is a set of pure functions and the tuple of rules made of them."""
