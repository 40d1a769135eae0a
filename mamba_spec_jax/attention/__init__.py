"""What mixes tokens: full attention, the recurrences, and the backends that route between them."""
