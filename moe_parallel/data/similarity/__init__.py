"""Similarity batching: training instances made of similar documents (Lory, section 3.2).

documents -> embeddings -> nearest neighbors -> a greedy path -> instances. Rows of every array
are documents, in the order of the file, unless its name says otherwise.
"""
