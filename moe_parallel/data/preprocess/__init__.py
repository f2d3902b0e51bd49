"""From files of text to indexed datasets: the work of tools/preprocess_data.py.

inputs.py finds the files, compressed.py and batches.py read them, records.py parses them,
encoder.py tokenizes them in worker processes, and run.py writes the result.
"""
