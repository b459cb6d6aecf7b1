"""Servers that speak OpenAI's API, whoever wrote them: asked from outside, timed from outside."""
