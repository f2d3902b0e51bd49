"""Trained models of one expert-selection system made into models of another."""
