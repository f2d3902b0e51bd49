"""Text from a model: a cache of keys and values, sampling, stop strings, chats."""
