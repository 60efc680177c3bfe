"""Schedulers of clusters: the options of a job, and the programs that submit, list and cancel jobs."""
