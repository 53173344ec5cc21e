"""What measurements mean."""
