
"use strict";
const form = document.querySelector("form");
const main = document.querySelector("main");
const cards = [...document.querySelectorAll(".activation")];
const within = (value, low, high) => value === "" ? low === "" && high === "" :
  (low === "" || Number(value) >= Number(low)) && (high === "" || Number(value) <= Number(high));
const signs = { up: a => a > 0, none: a => a === 0, down: a => a < 0 };

function apply() {
  const agents = new Set([...form.querySelectorAll("input[name=agent]:checked")].map(box => box.value));
  const { validity, advantage, low, high, layout, masked } = form.elements;
  let shown = 0;
  for (const card of cards) {
    const { agent, reward, advantage: own, valid } = card.dataset;
    const keep = agents.has(agent) && within(reward, low.value, high.value) &&
      (validity.value === "any" || valid === validity.value) &&
      (advantage.value === "any" || own !== "" && signs[advantage.value](Number(own)));
    card.classList.toggle("off", !keep);
    shown += keep;
  }
  for (const part of document.querySelectorAll(".session, .prompt, .calls"))
    part.hidden = !part.querySelector(".activation:not(.off)");
  main.classList.toggle("stacked", layout.value === "stacked");
  main.classList.toggle("unmasked", !masked.checked);
  form.querySelector("output").value = `${shown} of ${cards.length} activations`;
}

form.addEventListener("input", apply);
form.addEventListener("submit", event => event.preventDefault());
form.addEventListener("reset", () => setTimeout(apply));
form.hidden = false;
apply();
