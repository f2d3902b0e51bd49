"""The computation of the experts, for all experts of a rank at once."""
