"""Communication of a rank: process groups, moves of columns, syncs of weights. Imports no engine."""
