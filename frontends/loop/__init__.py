"""Training loops: capture while one runs, what it weighs its examples by, and acting on it."""
