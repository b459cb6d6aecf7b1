"""Drafts that get weights: trained, measured, recorded."""
