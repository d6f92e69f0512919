"""Slices of a problem, and the merge of their results: what ranks and streamed keys share."""
