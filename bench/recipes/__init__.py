"""Published training steps as data, and the planner's seconds of them."""
