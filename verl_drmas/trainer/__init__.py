"""The registered trainers: one policy per model, advantages over a team's real rows."""
