// Formulas: the TeX of each element of the class "formula" (docs/conf.py) becomes what KaTeX makes of it.
for (const element of document.querySelectorAll(".formula")) {
  const options = { displayMode: element.classList.contains("display"), throwOnError: false };
  katex.render(element.textContent, element, options);
}
