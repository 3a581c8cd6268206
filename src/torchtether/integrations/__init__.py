"""Support for Weights in other libraries: one module for each library, which its users import."""
