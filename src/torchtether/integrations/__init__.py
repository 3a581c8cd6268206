"""What other libraries must be told of Weights: a module for each library, which its users import."""
