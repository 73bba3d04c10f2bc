"""Update rules: hyper-parameters, the C++ path for CPU tensors, and the torch reference that defines the bits."""
