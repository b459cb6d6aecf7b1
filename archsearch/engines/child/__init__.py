"""An engine in a process of its own: the host on our side, the loop on the engine's."""
