"""Every kind of drafter as a value: what it runs in a round, what it holds, what it is called. One
class a family."""
