"""``python -m cuflash``: a module for each command."""
