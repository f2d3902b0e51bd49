"""Evaluation by the tasks of lm-evaluation-harness, a package that is imported when it is used."""
