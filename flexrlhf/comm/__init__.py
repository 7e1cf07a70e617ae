"""Communication: groups, moving columns, moving weights. Executes what placement/ planned; knows no engine."""
