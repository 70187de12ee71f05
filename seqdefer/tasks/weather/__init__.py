"""The weather task: two hours of temperature in, the next hour out."""
