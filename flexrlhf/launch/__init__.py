"""Start of a job: ranks of one machine or several are started, watched, restarted and ended."""
