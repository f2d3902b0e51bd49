"""Similarity batching: training instances of similar documents (Lory, section 3.2).

The steps: documents, embeddings, nearest neighbors, a greedy path, instances. The rows of every
array are documents, in the order of the file, unless its name says otherwise.
"""
