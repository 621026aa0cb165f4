"""What a model needs of the machine before there is one: capacity, rooflines, and compilation for absent GPUs."""
