"""Heads on a target's hidden states: EAGLE-3 and Medusa, made from the target, trained on its
cached states."""
