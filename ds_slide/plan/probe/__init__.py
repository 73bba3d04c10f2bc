"""What the machine leaves this process to plan with."""
