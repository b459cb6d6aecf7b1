"""Engines that bring their own torch: how each is installed, and where it lives."""
