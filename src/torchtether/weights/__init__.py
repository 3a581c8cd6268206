"""The one wrapper subclass: its parts and facts, and a rule for each op."""
