"""Scores that come from no model: functions of the user, HTTP services, rules. None of it loads torch.

``Scorer`` calls the sources of one section; ``check_sources`` and ``check_columns`` check them before a run starts.
"""
