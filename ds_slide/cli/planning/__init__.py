"""`ds-slide plan`: what a JSON and a model will take, and how long a step will be, before the run."""
