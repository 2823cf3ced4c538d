"""Training: trainers, hooks, set-up and what several processes need."""
