"""From a deadline or a budget to what each device trains."""
