"""From plans to ranks: starting them on one machine or several, watching, restarting and ending them."""
