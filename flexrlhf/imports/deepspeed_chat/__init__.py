"""Jobs of DeepSpeed-Chat."""
