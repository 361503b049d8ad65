"""Models and tokenizers of Hugging Face, in the form that trainers and generators use."""
