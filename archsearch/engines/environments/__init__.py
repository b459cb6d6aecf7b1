"""Where engines live that bring their own torch: how each is installed, and the virtual
environments that are made of it."""
