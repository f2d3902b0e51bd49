"""Converts trained models of one expert-selection system to models of another."""
