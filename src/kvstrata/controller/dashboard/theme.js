// Runs before the first paint, so that the chosen theme is there at once. Without a choice the system's theme is used.
{
  const chosen = localStorage.getItem("kvstrata.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
