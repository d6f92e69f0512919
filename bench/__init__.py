"""Side-by-side measurements of cuflash and its peers; see `python -m bench --help`."""
