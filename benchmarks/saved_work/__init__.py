"""Work that a step leaves out: FLOPs and seconds with it and without, on the engine and the trainer of this package."""
