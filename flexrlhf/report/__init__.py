"""Page of runs and plans: curves, placement, timeline, bytes, memory, samples and settings in one HTML file."""
