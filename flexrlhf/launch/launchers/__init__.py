"""Ways to start the ranks of a job, a file each. What a rank does is the same under all of them."""
