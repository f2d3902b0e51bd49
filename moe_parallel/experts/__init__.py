"""What an expert computes, for all experts of a rank at once."""
