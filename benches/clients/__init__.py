"""One program per candidate: it takes a `Task` as its only argument and prints one line, its `Figures` as JSON."""
