"""The code blocks of README and docs: found, and run as a reader would run them."""
