"""The selections of a model on a text: totals in bounded memory, and tables in Parquet."""
