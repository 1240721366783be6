"""Word problems with drawn names and numbers. Each template takes a random.Random and returns the problem's text."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

Template = Callable[[Random], str]

NAMES = (
    "Amara", "Bruno", "Chen", "Dilek", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kavya", "Leila", "Marek",
    "Nadia", "Oskar", "Priya", "Quentin", "Rosa", "Samir", "Tomas", "Ulla", "Viktor", "Wanda", "Yusuf", "Zoe",
)  # fmt: skip
FRUIT = ("apples", "pears", "plums", "oranges", "peaches", "figs", "lemons")
GOODS = ("notebooks", "mugs", "lamps", "candles", "scarves", "baskets", "puzzles")
PLACES = ("the harbour", "the mill", "the old town", "the lake", "the museum", "the stadium")
SEEDS = ("tulips", "beans", "carrots", "sunflowers", "onions", "radishes")


def _two(rng: Random) -> list[str]:
    return rng.sample(NAMES, 2)


def _shopping(rng: Random) -> str:
    name, n, m = rng.choice(NAMES), rng.randint(3, 12), rng.randint(2, 9)
    a, b = rng.sample(FRUIT, 2)
    p, q = rng.randint(2, 9), rng.randint(2, 9)
    return (
        f"{name} buys {n} {a} at {p} cents each and {m} {b} at {q} cents each, and pays with a coin of 200 cents. "
        "How many cents come back?"
    )


def _boxes(rng: Random) -> str:
    per, full, left = rng.randint(4, 24), rng.randint(3, 15), rng.randint(1, 3)
    thing = rng.choice(GOODS)
    return (
        f"A workshop packs {thing} into boxes of {per}. At the end of the day there are {full} full boxes and {left} "
        f"{thing} left over. How many {thing} were made that day?"
    )


def _walking(rng: Random) -> str:
    name, speed, hours, back = rng.choice(NAMES), rng.randint(3, 6), rng.randint(2, 4), rng.randint(1, 2)
    return (
        f"{name} walks from home towards {rng.choice(PLACES)} at {speed} km per hour for {hours} hours, then turns "
        f"round and walks back at the same speed for {back} hour{'s' if back > 1 else ''}. "
        f"How far from home is {name} now?"
    )


def _saving(rng: Random) -> str:
    name, start, week, weeks = rng.choice(NAMES), rng.randint(10, 60), rng.randint(4, 15), rng.randint(5, 14)
    spent = rng.randint(5, 20)
    return (
        f"{name} has {start} euros in a tin and adds {week} euros every week. After {weeks} weeks {name} takes out "
        f"{spent} euros for a present. How much is in the tin then?"
    )


def _sharing(rng: Random) -> str:
    first, second = _two(rng)
    children, each, rest = rng.randint(3, 9), rng.randint(4, 12), rng.randint(1, 2)
    return (
        f"{first} and {second} share a bag of {children * each + rest} marbles equally among {children} children and "
        "keep what cannot be shared. How many marbles does each child get, and how many are kept?"
    )


def _ages(rng: Random) -> str:
    young, old = _two(rng)
    age, times, years = rng.randint(4, 12), rng.randint(2, 4), rng.randint(3, 10)
    return f"{young} is {age} years old and {old} is {times} times as old. How old will {old} be in {years} years?"


def _garden(rng: Random) -> str:
    rows, per, lost = rng.randint(4, 12), rng.randint(6, 15), rng.randint(2, 9)
    plant = rng.choice(SEEDS)
    return (
        f"A gardener plants {rows} rows of {plant} with {per} plants in each row. Snails eat {lost} plants in every "
        "second row, beginning with the first one. How many plants remain?"
    )


def _discount(rng: Random) -> str:
    name, thing = rng.choice(NAMES), rng.choice(("a coat", "a bicycle", "a desk", "a tent", "a guitar"))
    price, percent = rng.randint(4, 30) * 20, rng.choice((5, 10, 15, 20, 25, 30))
    return (
        f"{name} wants {thing} that costs {price} euros. In the sale it is {percent} percent cheaper. "
        "What does it cost now?"
    )


def _reading(rng: Random) -> str:
    name, pages, first, later = rng.choice(NAMES), rng.randint(15, 40), rng.randint(2, 5), rng.randint(5, 20)
    days = rng.randint(4, 9)
    return (
        f"{name} reads {pages} pages a day for {first} days and then {pages + later} pages a day for {days} days, and "
        "has finished the book. How many pages does it have?"
    )


def _tank(rng: Random) -> str:
    fill, drain, minutes, start = rng.randint(8, 20), rng.randint(2, 7), rng.randint(6, 25), rng.randint(10, 90)
    return (
        f"A tank holds {start} litres of water. A pipe adds {fill} litres a minute while a leak loses {drain} litres a "
        f"minute. How much water is in the tank after {minutes} minutes?"
    )


def _bakery(rng: Random) -> str:
    trays, per, sold, price = rng.randint(4, 10), rng.randint(8, 16), rng.randint(12, 30), rng.randint(2, 4)
    return (
        f"A bakery bakes {trays} trays of {per} rolls. In the morning {sold} rolls are sold, in the afternoon all the "
        f"others. A roll costs {price} euros. How much money does the afternoon bring?"
    )


def _rectangle(rng: Random) -> str:
    width, more = rng.randint(3, 18), rng.randint(2, 11)
    return (
        f"A rectangular field is {width} metres wide and {more} metres longer than wide. How long a fence does it "
        "need, and what is its area?"
    )


def _average(rng: Random) -> str:
    name, count, mean = rng.choice(NAMES), rng.randint(3, 4), rng.randint(6, 15)
    scores = [mean + rng.randint(-4, 4) for _ in range(count)]
    shown = ", ".join(map(str, scores))
    return (
        f"In {count} games {name} scores {shown} points. How many points does {name} need in the next game for an "
        f"average of exactly {mean} points?"
    )


def _trains(rng: Random) -> str:
    slow, faster, hours = rng.randint(4, 8) * 10, rng.randint(1, 5) * 10, rng.randint(2, 6)
    return (
        f"Two trains leave the same station in opposite directions, one at {slow} km per hour and one at "
        f"{slow + faster} km per hour. How far apart are they after {hours} hours?"
    )


def _remainder(rng: Random) -> str:
    a, b, c = rng.randint(120, 900), rng.randint(7, 19), rng.randint(3, 6)
    return f"What is the remainder when {a} is divided by {b}, and what is {c} times that remainder?"


def _equation(rng: Random) -> str:
    x, a, b = rng.randint(2, 15), rng.randint(2, 9), rng.randint(1, 40)
    letter = rng.choice("xyztn")
    return f"Solve {a}{letter} + {b} = {a * x + b} for {letter} and check the solution by putting it in."


def _fraction(rng: Random) -> str:
    name, parts, taken = rng.choice(NAMES), rng.choice((3, 4, 5, 6, 8)), rng.randint(1, 2)
    total = parts * rng.randint(5, 14)
    return (
        f"There are {total} students in a choir. {taken}/{parts} of them sing bass, and half of the others sing alto, "
        f"{name} among them. How many sing alto? Say so if the number is not whole."
    )


def _clock(rng: Random) -> str:
    hour, minute = rng.randint(6, 11), rng.choice((5, 10, 15, 20, 35, 40, 50))
    ride, wait = rng.randint(35, 95), rng.randint(5, 25)
    return (
        f"A bus leaves at {hour}:{minute:02d}, drives for {ride} minutes, waits {wait} minutes and drives the same "
        "time back. At what time does it return?"
    )


def _ratio(rng: Random) -> str:
    first, second = _two(rng)
    a, b, unit = rng.randint(1, 5), rng.randint(2, 7), rng.randint(4, 12)
    return (
        f"{first} and {second} divide {(a + b) * unit} stamps in the ratio {a} : {b}. "
        "How many stamps does each of them get?"
    )


def _stairs(rng: Random) -> str:
    floors, steps, times = rng.randint(3, 9), rng.randint(12, 22), rng.randint(2, 6)
    name = rng.choice(NAMES)
    return (
        f"A house has {floors} floors above the ground, with {steps} steps between one floor and the next. {name} "
        f"delivers parcels and climbs from the ground to the top {times} times. How many steps up is that?"
    )


def _sequence(rng: Random) -> str:
    start, step, nth = rng.randint(2, 20), rng.randint(3, 11), rng.randint(12, 40)
    return (
        f"A sequence begins {start}, {start + step}, {start + 2 * step} and goes on in the same way. What is its "
        f"{nth}th term, and what is the sum of its first {rng.randint(5, 8)} terms?"
    )


def _recipe(rng: Random) -> str:
    people, flour, eggs, guests = (
        rng.choice((2, 4)),
        rng.randint(2, 5) * 100,
        rng.choice((2, 4)),
        rng.choice((6, 8, 10, 12)),
    )
    return (
        f"A recipe for {people} people needs {flour} grams of flour and {eggs} eggs. How much flour and how many eggs "
        f"does {rng.choice(NAMES)} need for {guests} people?"
    )


def _parking(rng: Random) -> str:
    first, more, hours = rng.randint(2, 6), rng.randint(1, 3), rng.randint(3, 9)
    return (
        f"Parking costs {first} euros for the first hour and {more} euro{'s' if more > 1 else ''} for every hour after "
        f"that. {rng.choice(NAMES)} parks for {hours} hours on {rng.randint(2, 5)} days. What is the price altogether?"
    )


def _legs(rng: Random) -> str:
    hens, sheep = rng.randint(4, 20), rng.randint(3, 15)
    return (
        f"On a farm there are only hens and sheep, {hens + sheep} animals with {2 * hens + 4 * sheep} legs altogether. "
        "How many sheep are there?"
    )


def _candles(rng: Random) -> str:
    length, rate, hours = rng.randint(18, 30), rng.randint(1, 3), rng.randint(2, 5)
    return (
        f"A candle is {length} cm long and gets {rate} cm shorter every hour. After {hours} hours it is blown out, and "
        f"the next evening it burns again until {rng.randint(1, 3)} cm are left. How long does it burn on the second "
        "evening?"
    )


def _painters(rng: Random) -> str:
    workers, days = rng.choice((2, 3, 4, 6)), rng.choice((6, 8, 12))
    other = rng.choice([count for count in (2, 3, 4, 6, 8) if count != workers and workers * days % count == 0])
    return f"{workers} painters need {days} days for a school. How many days do {other} painters need at the same pace?"


def _library(rng: Random) -> str:
    shelves, per, out, back = rng.randint(5, 14), rng.randint(18, 36), rng.randint(20, 60), rng.randint(5, 19)
    return (
        f"A library has {shelves} shelves with {per} books on each. On Monday {out} books are lent and {back} are "
        "brought back; on Tuesday it is the same again. How many books stand on the shelves on Tuesday evening?"
    )


def _tickets(rng: Random) -> str:
    adult, child, adults, children = rng.randint(9, 15), rng.randint(4, 8), rng.randint(20, 60), rng.randint(10, 50)
    return (
        f"A theatre sells {adults + children} tickets for one evening. Adults pay {adult} euros and children {child} "
        f"euros, and the theatre takes {adults * adult + children * child} euros. How many children came?"
    )


def _interest(rng: Random) -> str:
    amount, percent, years = rng.randint(2, 20) * 100, rng.choice((2, 3, 4, 5)), rng.randint(2, 5)
    return (
        f"{rng.choice(NAMES)} lends {amount} euros at {percent} percent simple interest a year. How much has to be "
        f"paid back in one sum after {years} years?"
    )


def _ribbons(rng: Random) -> str:
    metres, piece, cost = rng.randint(4, 12), rng.choice((15, 20, 25, 35, 40)), rng.randint(2, 6)
    return (
        f"A ribbon of {metres} metres is cut into pieces of {piece} cm. How many whole pieces are there, how much is "
        f"left, and what do the pieces bring at {cost} euros each?"
    )


TRAIN: tuple[Template, ...] = (
    _shopping, _boxes, _walking, _saving, _sharing, _ages, _garden, _discount, _reading, _tank, _bakery,
    _rectangle, _average, _trains, _remainder, _equation, _fraction, _clock, _ratio, _stairs, _sequence,
    _recipe,
)  # fmt: skip
EVAL: tuple[Template, ...] = (
    _parking, _legs, _candles, _painters, _library, _tickets, _interest, _ribbons,
)  # fmt: skip
