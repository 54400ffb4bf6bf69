"""A study on a task that needs experts: thousands of letters and signs, see PLAN.md."""
