"""A search that trains, inside a time budget: `search.rungs` decides (numbers in, choices out),
`drafts.trainer` trains, `runs.state` remembers."""
